"""lm-eval's task definitions, with data sets from the hub or from local copies."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants, get_session
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PAPER_TASKS

# Metrics in order of preference.
METRICS = ("acc_norm", "acc", "exact_match")
# Folders of lm-eval that define common tasks. Reading all of lm-eval's definitions takes seconds.
FOLDERS = {name: name for name in PAPER_TASKS} | {
    "arc_challenge": "arc",
    "arc_easy": "arc",
    "boolq": "super_glue/boolq",
    "commonsense_qa": "commonsense_qa",
    "copa": "super_glue/copa",
    "lambada_openai": "lambada",
    "lambada_standard": "lambada",
    "multirc": "super_glue/multirc",
    "qqp": "glue/qqp",
    "social_iqa": "siqa",
}
HUB_ATTEMPTS = 2


class TaskUnavailableError(Exception):
    """Reports in one line why a task cannot be evaluated; other tasks are evaluated anyway."""


@dataclasses.dataclass(frozen=True)
class LoadedTask:
    """A downstream task with its data.

    Attributes:
        task: lm-eval's task object.
        name: lm-eval's name of the task.
        metric: the metric that is reported.
        shots_from: the split that few-shot examples are sampled from.
        is_zero_shot: whether the definition fixes the number of shots at 0.
    """

    task: Any
    name: str
    metric: str
    shots_from: str
    is_zero_shot: bool

    def set_shots(self, shots: int, seed: int) -> None:
        """Set the number of few-shot examples per question, sampled by ``seed``.

        Raises:
            TaskUnavailableError: if the task's definition does not allow that number.
        """
        if shots and self.is_zero_shot:
            raise TaskUnavailableError("the task's definition fixes the number of shots at 0")
        self.task.set_config(key="num_fewshot", value=shots)
        self.task.set_fewshot_seed(seed=seed)

    @property
    def scores_gold_answers(self) -> bool:
        """Whether the task requests the log-likelihoods of gold answers."""
        return self.task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood")

    def gold_answer(self, doc: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the number of the request that scores the gold answer, and the answer.

        The answer is the requested continuation, with a leading space if the task adds one. If
        several answers are correct, the first one counts. None if the question has no gold answer,
        an empty one, or the task does not request log-likelihoods of answers.
        """
        task = self.task
        if not self.scores_gold_answers:
            return None
        if task.OUTPUT_TYPE == "loglikelihood":
            answer = task.doc_to_target(doc)
            return (0, answer) if answer else None
        # With multiple inputs, such as winogrande's, the answers differ in their contexts.
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        gold = gold[0] if isinstance(gold, list) and gold else gold
        choices = task.doc_to_choice(doc)
        if isinstance(gold, str) and gold in choices:
            gold = choices.index(gold)
        if not isinstance(gold, int) or not 0 <= gold < len(choices):
            return None
        continuation = task.doc_to_target(doc) if task.multiple_input else choices[gold]
        answer = f"{task.config.target_delimiter}{continuation}"
        return (gold, answer) if answer else None

    def require_gold_answers(self, limit: int | None) -> None:
        """Check the first ``limit`` questions, or all of them if it is None.

        Raises:
            TaskUnavailableError: if the gold answer of a question is missing, or is not scored.
        """
        if not self.scores_gold_answers:
            raise TaskUnavailableError(
                f"its output_type is {self.task.OUTPUT_TYPE}, so no gold answers are scored; "
                "choose tasks of the type multiple_choice or loglikelihood"
            )
        try:
            documents = self.task.doc_iterator(limit=limit)
            missing = [number for number, doc in documents if self.gold_answer(doc) is None]
        except Exception as error:  # a task can raise any type of error
            raise TaskUnavailableError(in_one_line(error)) from error
        if missing:
            raise TaskUnavailableError(
                f"question {missing[0]} (counted from 0) has no gold answer; leave the task out"
            )

    def gold_bits_per_byte(self, sample: Mapping[str, Any]) -> float | None:
        """Return the bits per UTF-8 byte of the gold answer, from the scores of a question.

        Args:
            sample: a question, its requests and their responses, as lm-eval logs them.

        Returns:
            -log2 p(answer) / bytes(answer); None without a :meth:`gold_answer`.
        """
        found = self.gold_answer(sample["doc"])
        if found is None:
            return None
        number, answer = found
        log_likelihood, _ = sample["resps"][number][0]
        return float(-log_likelihood / math.log(2) / len(answer.encode()))


class TaskLibrary:
    """Definitions of tasks, and the location of their data.

    Args:
        names: names of single tasks, not of groups.
        data_dir: folder with the data sets as OWNER/NAME; None for the hub.

    Raises:
        UserError: if lm-eval has no task of that name, or ``data_dir`` does not exist.
    """

    def __init__(self, names: Sequence[str], data_dir: Path | None) -> None:
        self.data_dir = data_dir
        root = Path(lm_eval_tasks.__file__).parent
        folders = sorted({root / FOLDERS[name] for name in names if name in FOLDERS})
        self.manager = TaskManager(include_defaults=False, include_path=folders)
        if not set(names) <= set(self.manager.all_subtasks):
            self.manager = all_tasks()
        for name in names:
            if name in self.manager.all_subtasks:
                continue
            if tasks := tasks_of_group(self.manager, name):
                raise UserError(f"--tasks {name}: a group; name its tasks: {' '.join(tasks)}")
            raise UserError(f"--tasks {name}: unknown task; `lm_eval ls subtasks` lists them")
        if data_dir is not None:
            if not data_dir.is_dir():
                raise UserError(
                    f"--data-dir {data_dir} is not a folder; it must hold data sets as OWNER/NAME"
                )
            # The folder is deleted together with this object, since tasks read from it until then.
            self._scratch = tempfile.TemporaryDirectory()
            self.manager = self._with_local_data(names, data_dir, Path(self._scratch.name))

    def load(self, name: str) -> LoadedTask:
        """Load a task with its data.

        Raises:
            TaskUnavailableError: if the data cannot be loaded, or the task defines no accuracy.
        """
        folder, files = self._local_copy(name)
        if folder and not folder.is_dir():
            raise TaskUnavailableError(f"{folder} does not exist; copy the task's data set there")
        # An interrupted copy can leave an empty file, which the datasets package reads as zero
        # rows.
        for path in files:
            if not path.stat().st_size:
                raise TaskUnavailableError(f"{path} is empty; copy the data set again")
        problem = "" if folder else self.hub_problem
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        if problem:  # the datasets package would retry for minutes for every data set
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            task = self.manager.load(name)["tasks"][name]
        except Exception as error:  # the hub, files and definitions can raise any type of error
            raise TaskUnavailableError(
                f"{problem or in_one_line(error)}; local copies of data sets are read from "
                "--data-dir (see docs/downstream.md)"
            ) from error
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
        metric = next((each for each in METRICS if each in task.aggregation()), None)
        if metric is None:
            raise TaskUnavailableError(f"the task defines none of {', '.join(METRICS)}")
        return LoadedTask(
            task, name, metric, exclude_own_document(task), task.get_config("num_fewshot") == 0
        )

    def data_of(self, name: str) -> str | None:
        """Return the identity of a task's data, see :class:`PartSettings`.

        The identity is None if a local copy is missing.
        """
        folder, files = self._local_copy(name)
        if folder is None:
            return "hub"
        if not folder.is_dir():
            return None
        hashes = {path.relative_to(folder).as_posix(): sha256_of_files(path) for path in files}
        return f"sha256:{sha256_of_json(hashes)}"

    @functools.cached_property
    def hub_problem(self) -> str:
        """Return why the hub does not answer; empty if it answers, or if HF_HUB_OFFLINE is set."""
        if constants.HF_HUB_OFFLINE:
            return ""
        for _ in range(HUB_ATTEMPTS):
            try:
                get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
                return ""
            except Exception as error:  # the error's type depends on the HTTP library
                reason = in_one_line(error)
        return f"{constants.ENDPOINT} does not answer, and the data are not cached ({reason})"

    def _local_copy(self, name: str) -> tuple[Path | None, list[Path]]:
        """Return the folder of the task's local copy, and the files of the task's configuration.

        The folder is None if the data come from the hub. Hidden files are ignored. If the
        configuration has its own folder, only that folder is used, because other folders may be
        added later.
        """
        definition = self.manager.task_index[name].cfg or {}
        if self.data_dir is None or definition.get("dataset_path") is None:
            return None, []
        folder = Path(definition["dataset_path"])
        own = folder / (definition.get("dataset_name") or "")
        root = own if own.is_dir() else folder
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        visible = (p for p in found if not any(part.startswith(".") for part in p.parts))
        return folder, sorted(root / path for path in visible)

    def _with_local_data(self, names: Sequence[str], data_dir: Path, scratch: Path) -> TaskManager:
        """Redefine the tasks to read their data sets from ``data_dir``.

        The data sets are cached in ``scratch``: the shared cache identifies copies by name only,
        and might return the content of another copy.
        """
        for name in names:
            entry = self.manager.task_index[name]
            definition = entry.cfg or {}
            changed: dict[str, Any] = {"include": str(entry.yaml_path)}
            if definition.get("dataset_path") is not None:
                changed["dataset_path"] = str(data_dir.absolute() / definition["dataset_path"])
                kwargs = definition.get("dataset_kwargs") or {}
                changed["dataset_kwargs"] = {**kwargs, "cache_dir": str(scratch / "cache")}
            # JSON is a subset of YAML.
            (scratch / f"{name}.yaml").write_text(json.dumps(changed), encoding="utf-8")
        return TaskManager(include_defaults=False, include_path=scratch)


def tasks_of_group(manager: TaskManager, name: str) -> list[str]:
    """Sorted names of the tasks in a group or with a tag of lm-eval; empty if there is none."""
    entry = manager.task_index.get(name)
    if entry is None:
        return []
    config = entry.cfg or {}
    members = {each for each in config.get("task") or () if isinstance(each, str)} | entry.tags
    return sorted(
        task
        for member in members - {name}
        for task in (
            [member] if member in manager.all_subtasks else tasks_of_group(manager, member)
        )
    )


@functools.cache
def all_tasks() -> TaskManager:
    """Index all tasks of lm-eval, in about 8 seconds; later calls return the same index."""
    return TaskManager()


def exclude_own_document(task: ConfigurableTask) -> str:
    """Exclude a question's own document from its few-shot examples; return the split of examples.

    lm-eval excludes the question only if the definition names the same split for examples and
    tests. If the definition omits one of the two splits, lm-eval may still use the same split for
    both.
    """
    few_shot, splits = task.fewshot_cfg, task.config
    if few_shot.split is None and few_shot.samples is not None:
        return "its definition"
    source = few_shot.split or splits.training_split or splits.validation_split or splits.test_split
    if source != (splits.test_split or splits.validation_split):
        return str(source)
    few_shot.split = splits.test_split
    return f"{source}, the question's own document left out"


def in_one_line(error: Exception) -> str:
    """Format an error as one line: its message, its type unless UserError, and its causes."""
    if isinstance(error, UserError):
        return str(error)
    cause = f" ({in_one_line(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{cause}"
