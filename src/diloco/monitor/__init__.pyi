from .console import LiveConsole as LiveConsole
from .console import PlainConsole as PlainConsole
from .progress import RunProgress as RunProgress
from .settings import MonitorSettings as MonitorSettings
from .sinks import MetricsFile as MetricsFile
from .sinks import Sinks as Sinks
from .sinks import make_sinks as make_sinks
from .sinks import read_metrics as read_metrics
