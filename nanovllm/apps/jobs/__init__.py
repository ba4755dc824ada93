"""Offline batch jobs: a file of requests in, a file of results out, nothing lost and nothing twice."""
