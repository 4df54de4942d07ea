"""Lightning: Trainer.fit with a validation loader."""

import lightning
import torch
from slow_data import EPOCHS, SlowRows, numbers, small_model, tell
from torch.utils.data import DataLoader

SAMPLES = 320


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model()
        self.order = []

    def training_step(self, batch, _):
        rows, labels = batch
        self.order += numbers(rows, SAMPLES)
        return torch.nn.functional.cross_entropy(self.model(rows), labels)

    def validation_step(self, batch, _):
        self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
classifier = Classifier()
trainer = lightning.Trainer(
    max_epochs=2 * EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
train_loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True)
trainer.fit(classifier, train_loader, DataLoader(SlowRows(32), batch_size=8))
tell(trainer.global_step, len(classifier.order), classifier.order)
