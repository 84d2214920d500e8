"""The time limit of waits for other processes, which only a hang reaches."""

from __future__ import annotations

HANG_SECONDS = 540.0
"""On a machine with thirty busy processes, the import of torch alone takes a minute, and a persister gets a
tenth of the share of other processes because of its nice value. The limit is below that of pytest for a test
(600 s), so that a failure still names what the test waited for."""
