"""What an engine loop counts about itself."""

from collections import Counter
from dataclasses import dataclass, field

from engine.ahead import AheadStats
from engine.expert_balancer import BalanceStats
from engine.runner import ForwardStats
from engine.speculation import DraftCounters


@dataclass(slots=True)
class LoopCounters:
    """Totals since the start; written by the engine loop only."""

    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_stale_messages: int = 0
    num_expired_leases: int = 0
    drafts: DraftCounters = field(default_factory=DraftCounters)
    failures: Counter[str] = field(default_factory=Counter)
    forward: ForwardStats = field(default_factory=ForwardStats)
    """The runner's own."""
    ahead: AheadStats = field(default_factory=AheadStats)
    balance: BalanceStats = field(default_factory=BalanceStats)
    """The model's own."""
    num_saved_bytes: int = 0
    """Of this rank's weights, by layer sharding."""
