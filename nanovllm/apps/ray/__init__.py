"""The engine on Ray: batches of Ray Data, and jobs on a cluster."""
