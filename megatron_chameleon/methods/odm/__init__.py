"""ODM: the mixture follows the domains' training losses, as rewards of a bandit.

Albalak et al.: Efficient Online Data Mixing for Language Model Pre-training, 2023.
"""

from __future__ import annotations

from megatron_chameleon.methods.online import Default, OnlineMethod

ONLINE = OnlineMethod(
    name="odm",
    follows="the domains' training losses, as rewards of a bandit",
    hook="megatron_chameleon.methods.odm.hook:OnlineDataMixing",
    defaults={
        "online_interval": Default(100),
        "online_smoothing": Default(0.9, "of rewards"),
        "online_warmup_iters": Default(None, "a hundredth of --train-iters"),
    },
)
