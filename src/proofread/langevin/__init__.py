"""Langevin dynamics and score error: certified scores, samplers, escape bounds and an audit."""

from .audit import AuditReport, initialization_audit
from .bounds import (
    EscapeBound,
    certified_log_horizon,
    diffusion_tv_bound,
    escape_bound,
    langevin_tv_bound,
    stationary_tv_bound,
    trap_radius,
    tv_lower_bound,
)
from .enclosures import LogEnclosure, ball_log_probability, trap_log_error
from .learned import ScoreNetworks, train_scores
from .radial import RadialChains, RadialStart, radial_chain
from .samplers import (
    Chains,
    DivergenceError,
    annealed_langevin,
    diffusion_sampler,
    langevin,
    mala,
)
from .scores import (
    GaussianScore,
    MemorizingScore,
    MixtureScore,
    RadialLaw,
    RadialScore,
    Score,
    TiltedScore,
    TrapScore,
)

__all__ = [
    "AuditReport",
    "Chains",
    "DivergenceError",
    "EscapeBound",
    "GaussianScore",
    "LogEnclosure",
    "MemorizingScore",
    "MixtureScore",
    "RadialChains",
    "RadialLaw",
    "RadialScore",
    "RadialStart",
    "Score",
    "ScoreNetworks",
    "TiltedScore",
    "TrapScore",
    "annealed_langevin",
    "ball_log_probability",
    "certified_log_horizon",
    "diffusion_sampler",
    "diffusion_tv_bound",
    "escape_bound",
    "initialization_audit",
    "langevin",
    "langevin_tv_bound",
    "mala",
    "radial_chain",
    "stationary_tv_bound",
    "train_scores",
    "trap_log_error",
    "trap_radius",
    "tv_lower_bound",
]
