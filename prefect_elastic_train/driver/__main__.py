"""``python -m prefect_elastic_train.driver <spec file>``."""

import sys

from prefect_elastic_train.driver.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
