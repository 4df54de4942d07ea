"""Pretrained models from a folder or the hub, without running their code; and training tokenizers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.recipes.out_folder import refuse_foreign, written_by_library
from fulltilt.recipes.recipe import Request
from fulltilt.train import checkpoint
from fulltilt.train.distributed import rank_from_env
from fulltilt.train.guards import is_out_of_memory
from fulltilt.train.weight_import import reason


def check_model(model: str, out: Path, instead: str) -> None:
    """Raise UsageError for a missing folder, a name that the hub cannot give, or the place of the trained model.

    Hub names have one slash at most, between owner and name.
    """
    meant_as_folder = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model
    if meant_as_folder and not Path(model).is_dir():
        raise UsageError(f"the model's folder {model} does not exist", "Give another with --model.")
    only_kept_files(model, instead)
    given, place = Path(model).resolve(), (out / "model").resolve()
    if given.is_dir() and place in (given, *given.parents):
        raise UsageError(
            f"--model {model} is where this run would put its own model", "Choose another folder with --out."
        )


def only_kept_files(name: str, instead: str) -> bool:
    """Whether the hub does not answer, but files of the model ``name`` are in its cache.

    Raises UsageError when neither is the case. One request with the hub's time limit (``HF_HUB_ETAG_TIMEOUT``, 10 s)
    replaces half a minute of retries for every file. Refusals and downloads are left to the hub's library.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if Path(name).is_dir():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, FileMetadataError, HFValidationError):
        return False
    except Exception as error:  # of the network; types differ between releases
        kept = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        if any(kept.glob("*/*")):
            return True
        what = f"{name} is not on this machine, and {constants.ENDPOINT} does not answer: {str(error)[:160]}"
        raise UsageError(what, instead) from error
    return False


def load(what: str, name: str, loader: Callable[..., Any], instead: str, **how: Any) -> Any:
    """What ``loader`` (a ``from_pretrained``) returns for a folder or hub name.

    Raises DataError for damaged files, UsageError for a wrong name.
    """
    try:
        return loader(name, local_files_only=only_kept_files(name, instead), trust_remote_code=False, **how)
    except Exception as error:  # hub, network and damaged files raise anything
        if isinstance(error, FulltiltError) or is_out_of_memory(error):
            raise
        told = str(error)
        # In both cases the library would advise to trust the file.
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in told:
            why = f"it holds more than weights, and loading it could run code ({reason(error)})"
            raise DataError(f"the {what} of {name} is refused: {why}", "Save its weights with safetensors.") from error
        if "trust_remote_code" in told:
            why = "it needs code of its own, which is not run"
            raise DataError(f"the {what} of {name} is refused: {why}", instead) from error
        first = (told.strip().splitlines() or [type(error).__name__])[0]
        # A folder of a model or tokenizer is damaged; anything else is a wrong flag.
        damaged = any(Path(name, file).is_file() for file in ("config.json", "tokenizer.json"))
        kind = DataError if damaged else UsageError
        raise kind(f"the {what} of {name} cannot be loaded: {first[:200]}", instead) from error


def evaluated_weights(folder: Path) -> dict[str, Any]:
    """The weights of a checkpoint as its evaluation used them: with ema_decay, the averaged ones.

    Raises DamagedCheckpoint.
    """
    weights, state = checkpoint.load(folder)
    return {**weights, **state.get("ema", {})}


# --------------------------------------------------------------------------- tokenizers


def own_tokenizer(request: Request, texts: Sequence[str], **how: Any) -> Any:
    """The tokenizer in the folder of this run, or of the one it resumes from; otherwise a new one, saved there.

    A resumed run needs the same tokenizer, also with other data. Raises ForeignFiles, DataError.
    """
    home = request.out / "tokenizer"
    refuse_foreign(home)
    from transformers import PreTrainedTokenizerFast

    known = [] if request.fresh else [home]
    if (begin := request.resume_from) is not None:  # OUT, or OUT/checkpoints/step-…
        known += [begin / "tokenizer", begin.resolve().parent.parent / "tokenizer"]
    for folder in known:
        if (folder / "tokenizer.json").is_file():
            return load("tokenizer", str(folder), PreTrainedTokenizerFast.from_pretrained, "Use --fresh.")
    made = trained_tokenizer(texts, **how)
    if rank_from_env().rank == 0:
        with written_by_library(home) as private:
            made.save_pretrained(str(private))
    return made


def trained_tokenizer(
    texts: Sequence[str], *, size: int, start: str, end: str, pad: str, lowercase: bool = False
) -> Any:
    """A byte-level BPE tokenizer of ``size`` tokens; the same texts give the same one.

    The special tokens are the first, in the order start, pad, end; ``pad`` may be ``end``.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    learnt = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=lowercase, unicode_normalizer="nfkc")
    special = list(dict.fromkeys([start, pad, end]))
    learnt.train_from_iterator(sorted(set(texts)), size, min_frequency=0, show_progress=False, special_tokens=special)
    made = Tokenizer.from_str(learnt.to_str())
    made.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(token, special.index(token)) for token in (start, end)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=start, eos_token=end, pad_token=pad)
