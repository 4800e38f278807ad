"""The paper, reproduced: its experiments as items of arms, the runs that are missing, and the tables they make."""
