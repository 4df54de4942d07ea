"""PyTorch Geometric: batches of graphs."""

import torch
from slow_data import augment, read_file, tell
from torch_geometric.data import Data, Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

SAMPLES = 480


class Graphs(Dataset):
    def len(self):
        return SAMPLES

    def get(self, index):
        nodes = augment(read_file(index)).reshape(8, 2)
        edges = torch.stack([torch.arange(8), torch.arange(8).roll(1)])
        return Data(x=nodes, edge_index=edges, y=torch.tensor([index % 4]), number=index)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = GCNConv(2, 16)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, graphs):
        nodes = self.convolution(graphs.x, graphs.edge_index).relu()
        return self.last(global_mean_pool(nodes, graphs.batch))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
order, steps = [], 0
for graphs in DataLoader(Graphs(), batch_size=8, shuffle=True):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(graphs), graphs.y).backward()
    optimizer.step()
    steps += 1
    order += graphs.number.tolist()
tell(steps, len(order), order)
