"""sentence-transformers: its trainer on pairs whose texts are slow to read."""

import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from slow_data import read_file, tell
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

words = {f"w{number}": number for number in range(500)} | {"[UNK]": 500}
tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu")


def read(batch):
    for number in batch["anchor"]:
        read_file(len(number))
    return batch


texts = [f"w{number} w{number // 2}" for number in range(480)]
data = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]}).with_transform(read)
arguments = SentenceTransformerTrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=1,
    per_device_train_batch_size=8,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model))
trainer.train()
tell(trainer.state.global_step, trainer.state.global_step * 8)
