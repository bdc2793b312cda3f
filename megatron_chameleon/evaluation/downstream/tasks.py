"""lm-eval's tasks as they are defined there, from the hub or from local copies of their data."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.hub import Hub
from megatron_chameleon.evaluation.downstream.local_copy import LocalCopy

# In the order in which they are taken.
METRICS = ("acc_norm", "acc", "exact_match")
# Where lm-eval defines the paper's tasks; to read all of its definitions takes some eight seconds.
FOLDERS = MappingProxyType(
    {
        "arc_easy": "arc",
        "copa": "super_glue/copa",
        "hellaswag": "hellaswag",
        "lambada_openai": "lambada",
        "logiqa": "logiqa",
        "multirc": "super_glue/multirc",
        "openbookqa": "openbookqa",
        "piqa": "piqa",
        "qqp": "glue/qqp",
        "race": "race",
        "sciq": "sciq",
        "social_iqa": "siqa",
        "winogrande": "winogrande",
    }
)
NOTES = MappingProxyType(
    {
        "race": "from version 3 (May 2026) on, its definition fills in the blanks of an article's "
        "earlier questions; the paper asked with the blanks",
    }
)
SCRIPT_REFUSED = "Dataset scripts are no longer supported"
COPIES = "give copies of data sets by --data-dir (docs/downstream.md says how)"


class CannotAskError(Exception):
    """Why a task cannot be asked, in one line; the others go on."""


@dataclasses.dataclass(frozen=True)
class LoadedTask:
    """A task with its data.

    Attributes:
        task: lm-eval's.
        name: what it is called.
        metric: the figure that counts.
        version: of its definition.
        shots_from: the split that shots are drawn from.
        without_shots: whether its definition forbids them.
    """

    task: Any
    name: str
    metric: str
    version: str
    shots_from: str
    without_shots: bool

    def set_shots(self, shots: int, seed: int) -> None:
        """Let so many solved examples stand before each question, drawn anew by ``seed``.

        Raises:
            CannotAskError: if the definition does not allow it.
        """
        if shots and self.without_shots:
            raise CannotAskError("its definition fixes the number of shots at 0")
        self.task.set_config(key="num_fewshot", value=shots)
        self.task.set_fewshot_seed(seed=seed)


class TaskLibrary:
    """The definitions of ``names``, and where their data are.

    Args:
        names: of single tasks.
        data_dir: holds OWNER/NAME for each data set; None for the hub.

    Raises:
        UserError: if lm-eval has no task of a name.
    """

    def __init__(self, names: Sequence[str], data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self.hub = Hub()
        self.manager = _manager(names)
        for name in names:
            if name not in self.manager.all_subtasks:
                raise UserError(f"--tasks {name}: {self._unknown(name)}")
        if data_dir is not None:
            if not data_dir.is_dir():
                raise UserError(f"--data-dir {data_dir} is no folder; it is to hold OWNER/NAME")
            # Deleted with the library: tasks read from it as long as they are asked.
            self._scratch = tempfile.TemporaryDirectory()
            self.manager = _with_local_data(self.manager, names, data_dir, Path(self._scratch.name))

    def load(self, name: str) -> LoadedTask:
        """The task with its data.

        Raises:
            CannotAskError: if the data cannot be had, or the task gives no accuracy.
        """
        self._check_local_copy(name)
        try:
            with self._from_hub(name):
                task = self.manager.load(name)["tasks"][name]
        except Exception as error:  # of the hub, of files, or of the definition: of any kind
            raise CannotAskError(self._why_not_loaded(error)) from error
        metric = next((each for each in METRICS if each in task.aggregation()), None)
        if metric is None:
            raise CannotAskError(f"it gives none of {', '.join(METRICS)}")
        return LoadedTask(
            task=task,
            name=name,
            metric=metric,
            version=str(task.VERSION),
            shots_from=keep_own_document_out(task),
            without_shots=task.get_config("num_fewshot") == 0,
        )

    def data_of(self, name: str) -> str | None:
        """What a task's data are known by: see :class:`PartSettings`; None of a missing copy."""
        copy = self._local_copy(name)
        if copy is None:
            return "hub"
        return f"sha256:{copy.sha256()}" if copy.exists() else None

    def _local_copy(self, name: str) -> LocalCopy | None:
        """Where its data are to be; None if that is not in the folder of copies."""
        definition = _definition(self.manager, name)
        if self.data_dir is None or definition.get("dataset_path") is None:
            return None
        return LocalCopy(Path(definition["dataset_path"]), definition.get("dataset_name"))

    def _check_local_copy(self, name: str) -> None:
        copy = self._local_copy(name)
        if copy is None:
            return
        if not copy.exists():
            raise CannotAskError(f"there is no {copy.folder}: put its data set there")
        empty = copy.empty_file()
        if empty is not None:
            raise CannotAskError(f"{empty} is empty")

    def _from_hub(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A block that loads a task, whose data may have to be asked for."""
        path = str(_definition(self.manager, name).get("dataset_path"))
        on_hub = self.data_dir is None and path.count("/") == 1 and not Path(path).is_dir()
        return self.hub.reading(path) if on_hub else contextlib.nullcontext()

    def _why_not_loaded(self, error: Exception) -> str:
        if SCRIPT_REFUSED in str(error):
            return f"{error}: its repository on the hub is a program; {COPIES}"
        if isinstance(error, OSError) and self.hub.problem:
            return f"{self.hub.problem}, and the data set is not kept here; {COPIES}"
        if isinstance(error, ConnectionError):
            return f"{in_one_line(error)}; {COPIES}"
        return in_one_line(error)

    def _unknown(self, name: str) -> str:
        if name in self.manager.all_tasks:
            return "that is a group of tasks; name the tasks in it"
        close = difflib.get_close_matches(name, self.manager.all_subtasks, n=3)
        hint = f"; is it {' or '.join(close)}?" if close else ""
        return f"lm-eval has no such task{hint or '; lm_eval ls tasks shows those it has'}"


def keep_own_document_out(task: ConfigurableTask) -> str:
    """Let no document be an example before its own question; the split that examples are from.

    lm-eval leaves it out where the split that the definition names for examples, if any, is the one
    that it names for tests, if any. What both really are may be the same split all the same.
    """
    few_shot, splits = task.fewshot_cfg, task.config
    if few_shot.split is None and few_shot.samples is not None:
        return "its definition"
    drawn_from = (
        few_shot.split or splits.training_split or splits.validation_split or splits.test_split
    )
    if drawn_from != (splits.test_split or splits.validation_split):
        return str(drawn_from)
    few_shot.split = splits.test_split
    return f"{drawn_from}, the question's own document left out"


def _manager(names: Sequence[str]) -> TaskManager:
    """One that knows ``names``; all of lm-eval's tasks where it has to."""
    root = Path(lm_eval_tasks.__file__).parent
    folders = sorted({root / FOLDERS[name] for name in names if name in FOLDERS})
    few = TaskManager(include_defaults=False, include_path=folders)
    return few if set(names) <= set(few.all_subtasks) else _all_definitions()


@functools.cache
def _all_definitions() -> TaskManager:
    return TaskManager()


def _with_local_data(
    manager: TaskManager, names: Sequence[str], data_dir: Path, scratch: Path
) -> TaskManager:
    """One in which the tasks are the same, but for where their data are.

    What is made of the data goes to ``scratch``: among what datasets caches, copies go by their
    names alone, and the content of another copy might be taken.
    """
    for name in names:
        definition = _definition(manager, name)
        kwargs = definition.get("dataset_kwargs") or {}
        changed: dict[str, Any] = {"include": str(manager.task_index[name].yaml_path)}
        if definition.get("dataset_path") is not None:
            changed["dataset_path"] = str(data_dir.absolute() / definition["dataset_path"])
            changed["dataset_kwargs"] = {**kwargs, "cache_dir": str(scratch / "cache")}
        # JSON is YAML too.
        (scratch / f"{name}.yaml").write_text(json.dumps(changed), encoding="utf-8")
    return TaskManager(include_defaults=False, include_path=scratch)


def _definition(manager: TaskManager, name: str) -> dict[str, Any]:
    """What lm-eval's file says of a task, without the functions that it names."""
    return manager.task_index[name].cfg or {}


def in_one_line(error: Exception) -> str:
    """What an error says, with its kind where it is not ours, and with what caused it."""
    if isinstance(error, UserError):
        return str(error)
    cause = f" ({in_one_line(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{cause}"
