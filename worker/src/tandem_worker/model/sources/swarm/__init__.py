"""One download that starters and serving workers share: decisions (`plan`), what is on disk (`parts`), the two kinds of
source (`peer`, `hub`), and their threads (`download`)."""
