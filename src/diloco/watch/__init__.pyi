from .followed import FollowedFolder as FollowedFolder
from .followed import FollowedSwarm as FollowedSwarm
from .page_data import page_data as page_data
from .prometheus import PrometheusSink as PrometheusSink
from .server import PageServer as PageServer
from .server import export_page as export_page
