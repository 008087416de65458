"""Recordings of an engine process, or of a router, and their replay in a fresh one.

The scheduler reads no clock and draws no random number, so its plans follow from its settings, the
calls into it, their times and the results of its steps. A recording holds these, and a digest of
every plan; a replay makes the same calls and compares the plans. A recording has no token and no
text. Must not change what the engine does. The same holds for a router. In reading order:

    entries.py   what a recording of an engine holds, as msgspec structs; the digest of a plan
    encoder.py   entries from engine calls; salted hashes in place of tokens
    router/      the same for a router: entries, encoder, recorder, replay
    kinds.py     the kinds of recordings, and how each is read
    parts.py     the files: blocks with checksums, a size limit per file and for all
    recording.py Recording: the queue and the thread that writes
    core.py      RecordedCore: an engine core whose calls are recorded
    reader.py    reads the files of a recording
    stand_ins.py StandIns: tokens in place of those that were not recorded
    replay.py    replays a recording and finds the first plan that differs
"""
