"""What is the largest that fits: searches over plans, each end of the answer certified by the dry run.

The package is a function too, as `pipefit fit` is a command: `pipefit.fit(task, "4x-titan-rtx")` answers on one screen.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipefit.validation import instance

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.cluster import Cluster
    from pipefit.overviews import Overview


class _Callable(ModuleType):
    """A package that is called: names of packages and of functions are one, and both are wanted of this one."""

    def __call__(self, model: Task, cluster: Cluster | str, **asked: Any) -> Overview:
        """Does `model` fit, on one screen: see `pipefit.fit.overview`, which has the arguments.

        `cluster` may be a name or a file, as `load_cluster` takes them. Print the answer, or end a notebook's cell
        with it.

        Raises:
            UsageError: what is no task or cluster, or what `overview` refuses.
        """
        from pipefit.capture import Task
        from pipefit.cluster import Cluster
        from pipefit.files import load_cluster
        from pipefit.fit.overview import overview

        instance("model", model, Task, "pipefit.Task says how a module is trained")
        if isinstance(cluster, str):
            cluster = load_cluster(cluster)
        instance("cluster", cluster, Cluster, 'a name such as "4x-titan-rtx" will do')
        return overview(model, cluster, **asked)


fit = sys.modules[__name__]
fit.__class__ = _Callable
