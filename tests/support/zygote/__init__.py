"""Starts of Python programs that do not import torch and Holdfast again: `Popen` and `run` as in subprocess.

An exec of a program that imports torch takes two CPU seconds, and the tests start hundreds of them. Here a
helper process, the zygote, imports the modules once and forks a child for each start. Each pytest worker has
one zygote for programs that import torch and one for all others, because the SDK looks whether torch has been
imported, and further ones for other values of variables that libraries read when they are loaded, such as
OMP_NUM_THREADS. They start at their first use and end with the worker.

    from tests.support import zygote

    process = zygote.Popen([sys.executable, "-m", "holdfast_sidecar"], env=..., stdout=log)

The child has what an exec would give it: arguments, environment, working directory, descriptors, session,
signals, `sys.path`, `__main__`, exit code and command line in /proc. Differences that remain:

* Modules that the program imports may have been imported before. Module state of the program is its own.
* All children of a zygote use the same hash seed, and numpy's matrix products use one thread.
* The child is a child of the zygote. The zygote reaps it, so it is never a zombie for longer than a moment.
* The interpreter is not finalized: the child runs what `atexit` has and ends with `os._exit`.

A start that no zygote can serve is an exec: another program than this interpreter, options of the
interpreter, a `preexec_fn`, or an output that is a terminal. Tests of the start itself, of memory, and of
what a program imports use subprocess.
"""

from __future__ import annotations

from tests.support.zygote.popen import Popen, run

__all__ = ["Popen", "run"]
