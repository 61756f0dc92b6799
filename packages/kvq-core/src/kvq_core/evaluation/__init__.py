"""What a mode costs a trained model, measured through the cache: text goes in chunk by chunk, each chunk's rows into the pages, and every
prediction attends over what the pages hold. ``none`` goes first, the other modes are held against it position by position.

::

    subject = TinySubject(load_model("examples/tiny_model/model.safetensors"))
    passages = subject.passages(read_documents("heldout.txt"), 1024)
    for result in evaluate(subject, [get_backend("none"), get_backend("int4")], passages[:-1], calibration=passages[-1]).results:
        print(result.mode, result.bits_per_byte, result.kl)
"""

from kvq_core.evaluation.journal import Journal
from kvq_core.evaluation.lockstep import Evaluation, evaluate
from kvq_core.evaluation.options import CacheConfig, parse_mode
from kvq_core.evaluation.results import Estimate, ModeResult
from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.texts import Document, read_documents
from kvq_core.evaluation.tiny_subject import TinySubject

__all__ = [
    "CacheConfig",
    "Document",
    "Estimate",
    "Evaluation",
    "Journal",
    "ModeResult",
    "Passage",
    "Session",
    "Subject",
    "TinySubject",
    "evaluate",
    "parse_mode",
    "read_documents",
]
