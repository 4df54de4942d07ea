"""How a model is named: a folder, or a name on the hub, which must answer or have been asked before."""

from __future__ import annotations

from pathlib import Path

from fulltilt.errors import UsageError


def refuse_unavailable(model: str, instead: str) -> None:
    """Raise UsageError for a folder that is not there and a name that cannot be had from the hub.

    Hub names have one slash at most, between owner and name.
    """
    meant_as_folder = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model
    if meant_as_folder and not Path(model).is_dir():
        raise UsageError(f"the model's folder {model} does not exist", "Give another with --model.")
    only_kept_files(model, instead)


def only_kept_files(name: str, instead: str) -> bool:
    """Whether the hub does not answer, but files of the model ``name`` were fetched before.

    Raises UsageError for a model that is neither here nor to be had. One question with the hub's own time limit
    (``HF_HUB_ETAG_TIMEOUT``, 10 s) instead of the half minute of retries that every single file would get; an answer
    of any kind, also a refusal, and the download itself are left to the hub's library.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name

    if Path(name).is_dir():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, FileMetadataError, HFValidationError):
        return False
    except Exception as error:  # the network's, which are others in every release of the library
        kept = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        if any(kept.glob("*/*")):
            return True
        told = (
            "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else str(error) or type(error).__name__
        )
        raise UsageError(
            f"{name} is not on this machine, and {constants.ENDPOINT} does not answer: {told[:160]}", instead
        ) from error
    return False
