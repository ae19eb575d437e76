"""`tandem_worker` that keeps kernels in a cache folder on any file system.

In a pod a folder of the container's own layer or of memory ends with it, so that keeping anything there is for nothing;
the folder of a benchmark lies there and outlives its workers.
"""

from tandem_worker.__main__ import main
from tandem_worker.host import environment

if __name__ == "__main__":
    environment.dies_with_container = lambda *_: False
    main()
