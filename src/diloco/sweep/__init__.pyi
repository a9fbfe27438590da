from .execute import Ended as Ended
from .execute import places as places
from .execute import run_all as run_all
from .outcomes import Outcomes as Outcomes
from .outcomes import table as table
from .study import Run as Run
from .study import read_study as read_study
