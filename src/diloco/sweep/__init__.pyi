from .results import places as places
from .results import results as results
from .results import run_all as run_all
from .results import summary_of as summary_of
from .results import table as table
from .study import read_study as read_study
