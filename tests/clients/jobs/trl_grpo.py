"""TRL: GRPO with a tiny model and a slow reward. Generation is no validation."""

import tempfile
import time

from datasets import Dataset
from slow_data import tell
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = {f"w{number}": number for number in range(60)} | {"[UNK]": 60, "[EOS]": 61, "[PAD]": 62}
plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
plain.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]")
config = GPT2Config(vocab_size=63, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=61, pad_token_id=62)


def score(completions, **_):
    time.sleep(0.2)
    return [float(len(set(text.split()))) for text in completions]


arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=6,
    max_steps=12,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = GRPOTrainer(
    GPT2LMHeadModel(config),
    reward_funcs=score,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": [f"w{number} w3" for number in range(48)]}),
    processing_class=tokenizer,
)
trainer.train()
tell(trainer.state.global_step, None)
