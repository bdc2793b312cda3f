"""DoGE from beginning to end: the proxy's run, and the mixture.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1. The base model that is trained by the mixture
comes after it, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

from megatron_chameleon.methods.common.proxy_run import check_batches, forward_only, train_proxy
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.hook import GradientAlignment
from megatron_chameleon.methods.gradient_alignment.outcome import write_mixture
from megatron_chameleon.methods.gradient_alignment.plan import DogePlan, plan_doge
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.watch import MakeHook


def compute_doge(
    options: DogeOptions, stops: StopRequests | None = None, elsewhere: str = BY_WORK_DIR
) -> bool:
    """Train what is not trained yet, and write the mixture. Every rank calls this.

    Args:
        options: what was asked for.
        stops: what takes the signals that ask for a stop, where there is more to do than this.
        elsewhere: how a person chooses another folder for the run.

    Returns:
        Whether it came to its end; False if it was asked to stop.

    Raises:
        UserError: for a mistake in the options or in what they name, before anything is trained;
            later, for what training refuses.
    """
    stops = stops or StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0) as layout:
        plan, is_main = from_main(lambda: plan_doge(options, elsewhere)), layout.is_main
        check_batches(options.proxy, layout)
    if is_main:
        print(f"\nDoGE's proxy, in {plan.proxy_run.run_dir}")
    watched_by, what = _hook_of(plan), "DoGE's proxy"
    if not train_proxy(plan.proxy_run, stops, watched_by, what=what, elsewhere=elsewhere):
        if is_main:
            print("stopped in the proxy; the same command goes on")
        return False
    with distributed(parallel, seed=0):
        from_main(lambda: write_mixture(plan))
    return True


def _hook_of(plan: DogePlan) -> MakeHook:
    return lambda run, _layout: GradientAlignment(
        run.data.names, plan.recipe, plan.roles, run.way_out
    )
