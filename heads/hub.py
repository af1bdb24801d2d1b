"""Whether the hub or its cache holds a repository, within 10 s; the hub's client takes 23 s."""

from functools import cache

from treespec.heads import places

SECONDS = 10.0  # for the hub's first answer


@cache
def only_cached(name: str, revision: str | None = None) -> bool:
    """Whether to load a repository from the cache alone, because the hub cannot be reached.

    revision: default the main branch. Raises ValueError for a name or a revision that neither the
    cache nor the hub has.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # 1. Ask the hub with one request, never repeated.
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=SECONDS)

    # 2. The hub answered, but it gives no such repository.
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name} and log in"
        ) from error
    except RevisionNotFoundError as error:
        if places.cached(name, revision):
            return True
        raise ValueError(f"{name} has no revision {revision}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        if places.cached(name, revision):
            return True
        raise ValueError(
            f"{name} is neither a directory nor a repository of the hub (private ones take `hf "
            "auth login`)"
        ) from error
    except (EntryNotFoundError, HfHubHTTPError):
        return False  # the loader says better what is missing, or why the hub refuses

    # 3. No network: each HTTP client that the hub's library may use raises errors of its own.
    except Exception as error:
        if places.cached(name, revision):
            return True
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        state = f"revision {revision} of it" if revision and places.cached(name) else "it"
        raise ValueError(
            f"no directory {name}; as a hub id {state} is not in the cache, and {why}"
        ) from error
    return False
