"""Explains errors of the hub in one sentence, with a remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentflow.engine.store.hub_names import HubName, cache_folder, cached_model
from agentflow.errors import PullFailed


@contextmanager
def explained(name: HubName, file: str = "") -> Iterator[None]:
    """Turns the errors of the hub's library into ``PullFailed``. ``file``: the file being fetched."""
    import httpx2

    try:
        yield
    # The last four mean that the answer does not come from a hub.
    except (OSError, httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        what, param = _explanation(error, name, file)
        raise PullFailed(what, param=param) from error


def _explanation(error: Exception, name: HubName, file: str) -> tuple[str, str]:
    import httpx2
    from huggingface_hub import constants, errors

    hub = f"the hub at {constants.ENDPOINT}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # after this error, the library searched its cache
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{name} cannot be pulled, because HF_HUB_OFFLINE is set: unset it", "HF_HUB_OFFLINE"
    if isinstance(error, errors.FileMetadataError):
        return _no_hub(hub, name), "HF_ENDPOINT"
    if isinstance(error, errors.HfHubHTTPError):
        return _of_answer(error, hub, name, file)
    if isinstance(error, httpx2.HTTPError):
        reason = " ".join(str(error).split()) or type(error).__name__
        what = (
            f"{name} cannot be pulled, because {hub} cannot be reached ({reason}): check the network, the "
            "proxy and HF_ENDPOINT, then pull again"
        )
        if cached_model(name) is not None:
            what += "; the copy that was pulled before is still usable"
        return what, "HF_ENDPOINT"
    if isinstance(error, errors.HFValidationError):
        return f"{name} is not the name of a model on the hub: {error}", name.repository
    if isinstance(error, OSError):
        return _of_file(error, name, file)
    return _no_hub(hub, name), "HF_ENDPOINT"


def _of_answer(error: Any, hub: str, name: HubName, file: str) -> tuple[str, str]:
    """Explains an ``HfHubHTTPError``."""
    from huggingface_hub import errors, get_token

    repository, status = name.repository, error.response.status_code
    has_token = get_token() is not None
    log_in = "set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        do = "with the account of your token" if has_token else f"and provide a token ({log_in})"
        return f"{repository} is gated: accept its terms on its page on the hub {do}", repository
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"{repository} has no revision {name.revision}: give a branch, a tag or a commit's hash"
        return what, name.revision
    is_of_file = file and status == 404 and not isinstance(error, errors.RepositoryNotFoundError)
    if is_of_file or isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{hub} does not have {file} of {name}, which it lists: pull again later", file
    if isinstance(error, errors.DisabledRepoError):
        return f"{repository} has been disabled by its owner or the hub: take another model", repository
    if status == 401 and has_token and not isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} rejects the token: correct HF_TOKEN or run `hf auth login`", "HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        what = f"{hub} has no public model {repository}: check the name"
        token = "your token must be allowed to read it" if has_token else log_in
        return f"{what}; if it is private, {token}", repository
    if status == 403:
        return f"{hub} denies access to {repository}: provide a token with access ({log_in})", "HF_TOKEN"
    if status == 429:
        after = error.response.headers.get("Retry-After", "")
        wait = f"in {after} s" if after.isdigit() else "in some minutes"
        token = "" if has_token else f", or with a token, which raises the limit ({log_in})"
        return f"{hub} has received too many requests from you: pull again {wait}{token}", repository
    if status >= 500:
        return f"{hub} has an internal error (status {status}): pull {name} again later", repository
    return f"for {name}, {hub} returned status {status}: check HF_ENDPOINT and the name", repository


def _of_file(error: OSError, name: HubName, file: str) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk of {cache_folder()} is full: free some space, or set HF_HOME to another disk"
        return f"{what}, then pull {name} again", file
    if error.errno is None:  # raised by the library's check of the size
        return f"the size of {file} of {name} differs from the hub's: pull again", file
    what = f"{name} cannot be written to {cache_folder()} ({error}): set HF_HOME to a writable folder"
    return what, file


def _no_hub(hub: str, name: HubName) -> str:
    return f"{name} cannot be pulled: {hub} does not answer like a hub: check HF_ENDPOINT and the proxy"
