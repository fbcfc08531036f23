"""The configuration of a run, and the parts that your own plug-in needs for settings and traits."""

from paw.config.sections import Config, EnvConfig
from paw.config.traits import estimator
from paw.config.values import Section

__all__ = ["Config", "EnvConfig", "Section", "estimator"]
