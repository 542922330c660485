# SPDX-License-Identifier: Apache-2.0
"""What the script at boot does with nvidia-smi."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

from ..module_utils import gpusettings


def gpu_boot_lines(persistence, power_limit_w=None, lock_clocks_mhz=None):
    """Return the lines that put back persistence, power limits and clock locks, in the order that holds."""
    try:
        return gpusettings.boot_lines(gpusettings.wanted(persistence, power_limit_w, lock_clocks_mhz))
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filter for the collection."""

    def filters(self):
        return {"gpu_boot_lines": gpu_boot_lines}
