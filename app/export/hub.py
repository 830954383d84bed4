"""Uploading a finished folder to the Hugging Face hub."""

from pathlib import Path

from debias_diffusion.errors import UserError, reason


def check_repository(name: str) -> None:
    """Raises UserError unless `name` is a repository name that the hub allows, with its owner."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name of a hub repository: {reason(error)}.") from error
    if "/" not in name:
        raise UserError(f"{name!r} lacks the owner. Give owner/name.")


def push_folder(folder: Path, name: str) -> str:
    """Uploads a folder as the hub repository `name` and returns its address.

    A new repository is private. An existing one keeps its visibility and its other files.

    Raises:
        UserError: the repository cannot be created or written. The message says that the local folder is complete.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by debias-diffusion")
        return str(address)
    except Exception as error:  # no network, no token, no write access: the library has many types for them
        raise UserError(
            f"The folder {str(folder)!r} is complete, but could not be uploaded to {name!r}: {reason(error)}. "
            f"Log in with `hf auth login`, check the network, and run `hf upload {name} {folder}`."
        ) from error
