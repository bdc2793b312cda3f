"""Write a model as a Hugging Face repository, to a folder or to the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.files import require_new, require_writable
from megatron_chameleon.checkpoint.convert import write_huggingface
from megatron_chameleon.checkpoint.open_model import CheckpointModel, Model, open_model
from megatron_chameleon.checkpoint.options import PushOptions
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.huggingface_config import describe
from megatron_chameleon.report.model_card import (
    MIXTURE_NAME,
    load_card_content,
    model_card,
    portable,
)

CARD_NAME = "README.md"
# Weight files of an earlier upload, which may have had another number of shards.
EARLIER_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def push(options: PushOptions) -> None:
    """Write the repository of a finished run or another model; upload it with ``options.hub``.

    Raises:
        UserError: for a run that is not finished, a model that cannot be opened, an output folder
            that exists, a missing token of the hub, a damaged artifact or a failed upload. Only a
            failed upload leaves a folder, which is complete, at ``options.output``.
    """
    if options.output is not None:
        require_new([options.output], "choose a new folder for --output, or remove it")
        require_writable(options.output.parent, f"--output {options.output}")
    run = content = None
    if TrainingRun.exists(options.run):
        run = TrainingRun.load(options.run)
        if run.status != "finished":
            raise UserError(
                f"--run {options.run} is not finished ({run.status} at step {run.step} of "
                f"{run.train_iters}); resume it, or convert its last checkpoint with "
                "megatron-chameleon convert_checkpoint to-huggingface"
            )
    else:
        options.reject_changed(["evaluations"], f"{options.run} is not a run of pretrain_gpt")
    opened = open_model(options.run, "--run", options)
    if run is not None:
        assert isinstance(opened, CheckpointModel)
        if opened.step != run.step:
            raise UserError(
                f"--run {options.run}: its last intact checkpoint is of step {opened.step}, not "
                f"of step {run.step}; resume the run with its command"
            )
        content = portable(load_card_content(run, opened.record, options.evaluations))
    model, tokenizer = opened.with_own_vocabulary()
    name = options.hub or Path(str(options.output)).name
    loads_tokenizer = tokenizer.file.kind == "tokenizers"
    if content is None:
        body = plain_card(model, name)
    else:
        body = model_card(content, name, describe(model.config), loads_tokenizer=loads_tokenizer)
    data = ModelCardData(
        language=list(options.language) or None,
        license=options.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["data-mixing", "megatron-chameleon"],
    )

    def write_more(folder: Path) -> None:
        """Write the model card, and of a run the mixture and the record, to ``folder``."""
        if content is not None:
            content.mixture.save(folder / MIXTURE_NAME)
            dataclasses.replace(content.run, root=folder, checkpoints=[]).save()
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
        (folder / CARD_NAME).write_text(str(card), encoding="utf-8")

    hub = None if options.hub is None else Hub(options.hub, private=options.private)
    with tempfile.TemporaryDirectory(prefix="megatron-chameleon-push-") as temporary:
        # Without --output, the folder exists only until it is uploaded.
        output = options.output or Path(temporary) / "repository"
        write_huggingface(model, tokenizer, output.absolute(), options, write_more)
        if options.output is not None:
            print(f"written to {options.output}")
        if hub is not None:
            print(f"uploaded to {hub.upload(output)}")
    print(f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.hub or output}')")


def plain_card(model: Model, name: str) -> str:
    """Write the card, as Markdown, of a model whose training is not recorded."""
    return (
        f"# {name.rpartition('/')[2]}\n\n{describe(model.config)}. megatron_chameleon converted it "
        "from another format; `provenance.json` has the command, and the hash of the weights.\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({name!r})\n```\n"
    )


class Hub:
    """A model repository on the Hugging Face hub, and the account of this machine's token.

    Args:
        name: OWNER/NAME.
        private: require a private repository.

    Raises:
        UserError: if the name is invalid, if there is no token, or the hub rejects it or cannot be
            reached.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        self._api, self._name, self._private = HfApi(), name, private
        with self._as_user_error():
            validate_repo_id(name)
            self._api.whoami()

    def upload(self, folder: Path) -> str:
        """Upload ``folder`` in one commit, and return its URL.

        Weight files of earlier commits that are not in ``folder`` are deleted.

        Raises:
            UserError: if the upload fails; the content of the repository is then unchanged.
        """
        with self._as_user_error():
            self._api.create_repo(self._name, private=self._private, exist_ok=True)
            is_public = self._private and not self._api.model_info(self._name).private
        if is_public:
            raise UserError(
                f"--hub {self._name} exists and is public; choose another name, or leave "
                "--private out"
            )
        with self._as_user_error():
            commit = self._api.upload_folder(
                repo_id=self._name,
                folder_path=folder,
                commit_message="Upload model, tokenizer, mixture and model card",
                delete_patterns=EARLIER_WEIGHTS,
            )
        return str(commit)

    @contextlib.contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Raise every error of the block as a UserError.

        Their types depend on the release of huggingface_hub, and on its HTTP and Xet libraries.
        """
        try:
            yield
        except Exception as error:
            # Some errors name the cause only in the exception that they were raised from.
            reasons = dict.fromkeys(map(first_line, filter(None, (error, error.__cause__))))
            reason = " ".join(reasons).rstrip(".")
            raise UserError(
                f"--hub {self._name}: {reason}; check the name, the network, and that the token of "
                "'hf auth login' or HF_TOKEN may write to the repository"
            ) from error
