from .study import places as places
from .study import read_study as read_study
from .study import run_all as run_all
from .study import table as table
