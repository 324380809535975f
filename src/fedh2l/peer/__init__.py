"""Training between organisations: one process per member, without a server.

Methods, models and data are those of a simulation. Only connections, membership and audit are added here.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print text of other peers; it reads this when imported
