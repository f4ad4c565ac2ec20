"""`looseleaf up`: runs the services on the nodes of a Ray cluster. Ray decides on which node a group of services runs,
and starts a lost group again. On each node, the code of `looseleaf.serve` starts and watches the processes.
"""
