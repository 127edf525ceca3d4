"""``python scripts/coverage``: do public networks train in three stages with the bits of the plain loop?"""

import sys

from try_networks import main

sys.exit(main())
