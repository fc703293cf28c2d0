"""A file of JSON lines that shows whether it was changed.

Each line has the SHA-256 of itself and of all lines before it, and the file `<name>.head` the
number of lines and the last hash. So a line that is changed, removed or cut off is found. Who may
write both files can make them anew: they guard against mistakes and lost data, not against the
machine's owner.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.files import Lines, write_whole

LOG = logging.getLogger(__name__)


class ChainedLines:
    """Such a file, for its owner alone. The caller keeps other processes off."""

    def __init__(self, path: Path, what: str, owner: str, remedy: str) -> None:
        """Reads and writes nothing. `what` the file is, in words, and whose; `remedy` ends its
        errors."""
        self.path, self.head = path, path.with_name(f"{path.name}.head")
        self._what, self._remedy = what, remedy
        self._first = {"format": f"noniid {what} 1", "owner": owner}
        self._file, self._chain = Lines(path), ""
        self.count = self.headed = 0  # lines, and those that the head counts

    def read(self) -> list[dict[str, Any]]:
        """The fields of all lines. Begins the file if there is neither it nor its head.

        UserError names a file that is damaged, cut off or of another owner.
        """
        try:
            lines = [*self._file.read()]  # what a kill has cut off never left
            head = json.loads(self.head.read_bytes()) if self.head.exists() else {"lines": 0}
            fields = [dict(json.loads(line)) for line in lines]
            counted, last = int(head["lines"]), head.get("chain")
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(f"{self.path}: is no {self._what} ({error}); {self._remedy}") from None
        # A kill may have come between a line and the head.
        if not 0 <= len(lines) - counted <= 1:
            raise UserError(
                f"{self.path}: has {len(lines)} lines, and its head counts {counted}; "
                f"{self._remedy}"
            )
        chain = ""
        for number, entry in enumerate(fields, start=1):
            said, chain = entry.pop("chain", ""), _chained(chain, entry)
            if said != chain:
                raise UserError(f"{self.path}: line {number} was changed; {self._remedy}")
            if number == 1 and entry != self._first:
                raise UserError(
                    f"{self.path}: is the {self._what} of {shown(entry.get('owner'))}; this is "
                    f"{self._first['owner']!r}; {self._remedy}"
                )
            if number == counted and chain != last:
                raise UserError(f"{self.path}: {self.head.name} is of another file; {self._remedy}")
        self.count, self.headed, self._chain = len(lines), counted, chain
        if not lines:
            LOG.warning("%s: a new %s begins; it has nothing of before", self.path, self._what)
            self.add(self._first)
        self.write_head()
        return fields[1:]

    def add(self, fields: dict[str, Any]) -> None:
        """Adds a line, on the disk. `write_head` must follow. Raises UserError."""
        chain = _chained(self._chain, fields)
        self._file.add(json.dumps({**fields, "chain": chain}).encode())
        self.count, self._chain = self.count + 1, chain

    def write_head(self) -> None:
        """Writes the head, if it is behind. Raises UserError."""
        if self.headed < self.count:
            head = json.dumps({"lines": self.count, "chain": self._chain})
            write_whole(self.head, head, private=True)
            self.headed = self.count


def _chained(before: str, fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
