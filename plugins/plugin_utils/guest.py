"""What the connections into a guest share: the wrapped command, files in pieces, errors that say what to do.

A connection plugin puts `GuestConnection` in front of the connection that reaches the host. Everything the guest
receives goes through that host connection's `exec_command`, so its pipelining, retries, passwords and multiplexing
stay as they are, and no sshd or address is needed in the guest.
"""

from __future__ import annotations

import os
import re
import shlex

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_text

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
# What lxc-attach and pct print when there is nothing to attach to; anything else is the command's own failure.
NOT_RUNNING = re.compile(
    r"Failed to get init pid|Connection refused|(is|CT \d+) not running|container .* not running", re.I
)
FROZEN = re.compile(r"^lxc-attach: guest .* is frozen$", re.M)
NO_SUCH_GUEST = re.compile(r"No such container|is not defined|Configuration file '.*' does not exist", re.I)
NO_TOOL = re.compile(r"(lxc-attach|pct): (command )?not found|sudo: (lxc-attach|pct): command not found")
NO_RIGHT = re.compile(r"Insufficent privileges|Insufficient privileges|sudo: a (password|terminal) is required", re.I)


def guest_command(name: str, command: str, attach: str = "lxc-attach", sudo: bool = False) -> str:
    """Returns the shell command that runs `command` by /bin/sh inside guest `name` with a clean environment."""
    argv = ["sudo", "-n"] if sudo else []
    if attach == "pct":
        argv += ["pct", "exec", name, "--"]
    else:
        argv += ["lxc-attach", "--clear-env", "-n", name, "--"]
    argv += ["/usr/bin/env", "-i", *("%s=%s" % item for item in sorted(ENVIRONMENT.items()))]
    return shlex.join(["/bin/sh", "-c", _unless_frozen(name) + shlex.join([*argv, "/bin/sh", "-c", command])])


def _unless_frozen(name: str) -> str:
    """Returns shell text that ends with an error where the guest is frozen: to enter it would hang until it thaws."""
    states = (f"/sys/fs/cgroup/lxc.payload.{name}/cgroup.freeze", f"/sys/fs/cgroup/lxc/{name}/cgroup.freeze")
    files = " ".join(shlex.quote(path) for path in states)
    return (
        f'for f in {files}; do if [ -r "$f" ] && read -r s < "$f" && [ "$s" = 1 ]; then'
        f" echo {shlex.quote(f'lxc-attach: guest {name} is frozen')} >&2; exit 1; fi; done; exec "
    )


def explain(name: str, host: str, stderr: str) -> str | None:
    """Returns one line saying why guest `name` could not be entered, or None if `stderr` is the command's own."""
    lines = [
        line
        for line in stderr.splitlines()
        if re.match(r"(sudo: )?(lxc-attach|pct)\b|CT \d|Config|sh: |/bin/sh: |sudo: ", line)
    ]
    text = "\n".join(lines)
    if NO_TOOL.search(text):
        return (
            f"host {host} has no command to enter guest {name!r}: install the package lxc there,"
            " or correct lxc_guest_attach"
        )
    if NO_RIGHT.search(text):
        return (
            f"the login user of host {host} may not enter guest {name!r}: log in as root,"
            " or set lxc_guest_sudo with passwordless sudo"
        )
    if NO_SUCH_GUEST.search(text):
        return (
            f"host {host} has no guest {name!r}: correct lxc_guest_name in the inventory"
            " (lxc-ls -f or pct list shows them)"
        )
    if FROZEN.search(text):
        return (
            f"guest {name!r} on host {host} is frozen, so nothing in it can answer: thaw it on the host"
            f" (lxc-unfreeze -n {name}, pct resume {name}) and run again"
        )
    if NOT_RUNNING.search(text):
        return (
            f"guest {name!r} on host {host} is not running: run recover.yml, which starts it,"
            f" or start it by hand (lxc-start -n {name}, pct start {name})"
        )
    return None


class GuestConnection:
    """Turns the host connection it is put in front of into one into the guest."""

    def _host_label(self) -> str:
        return str(getattr(self, "host", None) or "(this machine)")

    def exec_command(self, cmd, in_data=None, sudoable=True):
        """Runs `cmd` in the guest; a guest that is not there makes the host unreachable, with one line."""
        name = str(self.get_option("guest_name"))
        wrapped = guest_command(name, to_text(cmd), self.get_option("guest_attach"), self.get_option("guest_sudo"))
        code, stdout, stderr = super().exec_command(wrapped, in_data=in_data, sudoable=sudoable)
        if code != 0:
            reason = explain(name, self._host_label(), to_text(stderr))
            if reason:
                raise AnsibleConnectionFailure(self._sharpen(name, reason))
        return code, stdout, stderr

    def _sharpen(self, name, reason):
        """lxc-attach says the same of a stopped guest and of none at all; lxc-info tells them apart."""
        if "is not running" not in reason or self.get_option("guest_attach") != "lxc-attach":
            return reason
        probe = shlex.join([*(["sudo", "-n"] if self.get_option("guest_sudo") else []), "lxc-info", "-s", "-n", name])
        _code, stdout, stderr = super().exec_command(probe, sudoable=False)
        if "doesn't exist" in to_text(stdout) + to_text(stderr):
            return explain(name, self._host_label(), "lxc-attach: No such container") or reason
        return reason

    def put_file(self, in_path, out_path):
        """Copies a controller's file into the guest, piece by piece; each piece can be sent again without harm."""
        if not os.path.exists(to_bytes(in_path)):
            raise AnsibleFileNotFound(f"file or module does not exist: {in_path}")
        piece = self.get_option("guest_piece_bytes")
        target = shlex.quote(to_text(out_path))
        with open(to_bytes(in_path), "rb") as source:
            offset = 0
            while True:
                data = source.read(piece)
                if not data and offset:
                    break
                # dd cuts the file at the offset first, so a piece sent twice is written once.
                feed = "iflag=fullblock" if data else "count=0"
                self._file_step(
                    f"dd of={target} bs=65536 oflag=seek_bytes seek={offset} {feed} status=none",
                    f"write {out_path}",
                    data or None,
                )
                offset += len(data)
                if len(data) < piece:
                    break
        self._file_step(f'test "$(stat -c %s {target})" = {offset}', f"verify the {offset} bytes of {out_path}")

    def fetch_file(self, in_path, out_path):
        """Copies a guest's file to the controller, piece by piece."""
        piece = self.get_option("guest_piece_bytes")
        source = shlex.quote(to_text(in_path))
        with open(to_bytes(out_path), "wb") as target:
            while True:
                skip = target.tell()
                data = self._file_step(
                    f"dd if={source} bs=65536 iflag=skip_bytes,count_bytes,fullblock"
                    f" skip={skip} count={piece} status=none",
                    f"read {in_path}",
                )
                target.write(data)
                if len(data) < piece:
                    break

    def _file_step(self, command, what, data=None):
        code, stdout, stderr = self.exec_command(command, in_data=data, sudoable=False)
        if code != 0:
            detail = to_text(stderr).strip().splitlines()[-1:] or [f"exit code {code}"]
            name = self.get_option("guest_name")
            raise AnsibleError(f"could not {what} in guest {name!r}: {detail[0]}")
        return stdout
