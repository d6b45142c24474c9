"""What bucketing refuses, and with which numbers.

BucketError
├── BadBuckets    a list of buckets that is malformed, or cannot serve what it must; names key, value and remedy
├── TooManyShapes more graphs than anybody would want to wait for
└── DoesNotFit    a length, or a step, above every compiled size
"""

from __future__ import annotations


class BucketError(ValueError):
    """Anything this package refuses."""


class BadBuckets(BucketError):
    """Buckets or limits that make no sense; the message names key, value and remedy."""


class TooManyShapes(BucketError):
    """The given buckets multiply to more graphs than the limit."""


class DoesNotFit(BucketError):
    """A length or a step that no compiled size holds; the message carries both numbers."""
