"""HTTP requests to servers: rewards, judges, retrievers, tools and environments.

This package sends and retries requests and enforces deadlines. What requests contain and what answers mean is
up to its callers.
"""
