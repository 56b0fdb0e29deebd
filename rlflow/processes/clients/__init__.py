"""Questions to servers: rewards, judges, retrievers, tools and environments that answer over HTTP.

Here: sending a question, retrying it, and its deadline.
Not here: the content of questions and the meaning of answers.
"""
