"""DoReMi from beginning to end: the reference's run, the proxy's, and the mixture.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. The base model that is trained by the mixture comes
after it, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

from megatron_chameleon.methods.common.proxy_run import check_batches, forward_only, train_proxy
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.excess_loss.hook import ExcessLossReweighting
from megatron_chameleon.methods.excess_loss.outcome import write_mixture
from megatron_chameleon.methods.excess_loss.plan import DoremiPlan, plan_doremi, write_natural
from megatron_chameleon.methods.excess_loss.reference import Reference
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.watch import MakeHook


def compute_doremi(
    options: DoremiOptions,
    stops: StopRequests | None = None,
    reference_run: PretrainOptions | None = None,
    elsewhere: str = BY_WORK_DIR,
) -> bool:
    """Train what is not trained yet, and write the mixture. Every rank calls this.

    Args:
        options: what was asked for.
        stops: what takes the signals that ask for a stop, where there is more to do than this.
        reference_run: how the reference is trained, where ``options`` do not say it.
        elsewhere: how a person chooses another folder for the runs.

    Returns:
        Whether it came to its end; False if it was asked to stop.

    Raises:
        UserError: for a mistake in the options or in what they name, before anything is trained;
            later, for what training refuses.
    """
    stops = stops or StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0) as layout:
        plan = from_main(lambda: plan_doremi(options, reference_run, elsewhere))
        check_batches(options.proxy, layout)
        is_main = layout.is_main
        from_main(lambda: write_natural(plan))
    if plan.reference_run and not _train(plan, plan.reference_run, "reference", stops, is_main):
        return False
    with distributed(parallel, seed=0):
        reference = from_main(plan.reference)
    watched_by = _hook_of(plan, reference)
    if not _train(plan, plan.proxy_run, "proxy", stops, is_main, watched_by):
        return False
    with distributed(parallel, seed=0):
        from_main(lambda: write_mixture(plan, reference))
    return True


def _hook_of(plan: DoremiPlan, reference: Reference) -> MakeHook:
    return lambda run, layout: ExcessLossReweighting(run, layout, reference, plan.recipe)


def _train(
    plan: DoremiPlan,
    options: PretrainOptions,
    what: str,
    stops: StopRequests,
    is_main: bool,
    watched_by: MakeHook | None = None,
) -> bool:
    """Train one of the two; whether it came to its end."""
    named = f"DoReMi's {what}"
    if is_main:
        print(f"\n{named}, in {options.run_dir}")
    finished = train_proxy(options, stops, watched_by, what=named, elsewhere=plan.elsewhere)
    if not finished and is_main:
        print(f"stopped in the {what}; the same command goes on")
    return finished
