"""Published suites of questions: where they lie, how they are asked, which answers are right."""
