# SPDX-License-Identifier: Apache-2.0
"""Models of a hub as the host has them: which ones they are, and the folder that each is staged from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils import modelhub


def _checked(models: Any) -> dict[str, Any]:
    if not isinstance(models, dict):
        raise AnsibleFilterError(f"model_store_models is {models!r}; expected names with their source each")
    return models


def hub_models(models: dict[str, Any]) -> list[str]:
    """Returns the names of the models whose source is ``hf:ORG/REPO``."""
    return sorted(name for name, about in _checked(models).items() if modelhub.is_hub(about))


def local_models(models: dict[str, Any], cache: str, absent: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the models, those of a hub with the host's folder as their source; without those that are absent."""
    gone = set(absent)
    return {name: modelhub.local(name, about, cache) for name, about in _checked(models).items() if name not in gone}


class FilterModule:
    """The filters of this file, as Ansible looks them up."""

    def filters(self) -> dict[str, Any]:
        """Return them by name."""
        return {"hub_models": hub_models, "local_models": local_models}
