"""The tables of the ledger. A change of them raises ``SCHEMA_VERSION``."""

from common.archive import ROLLOUTS

SCHEMA_VERSION = 3

SCHEMA = """
-- The ledger of a run (SQLite). Plain SQL may read it at any time: sqlite3 RUN_DIR/ledger.sqlite
-- A payload is named by one number made of its sample's key: (grp << 28) | (attempt << 16) | idx.

CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- One row for each attempt at a group (the samples of one prompt).
CREATE TABLE attempts (
    grp INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    lane TEXT NOT NULL,             -- train | eval
    prompt INTEGER NOT NULL,        -- place in the lane's prompt stream
    size INTEGER NOT NULL,          -- samples of the group
    state TEXT NOT NULL,            -- pending | leased | ready | claimed | trained | scored | dropped
    reason TEXT,                    -- why it was dropped
    generator TEXT,
    incarnation TEXT,               -- which process of that name
    held INTEGER NOT NULL,          -- version the generator held at the lease
    num_tokens INTEGER NOT NULL,
    step INTEGER,                   -- the step that trained it; eval: the step that was validated
    num_leases INTEGER NOT NULL,    -- how often it was handed out
    PRIMARY KEY (grp, attempt)
) WITHOUT ROWID;
CREATE INDEX attempts_by_state ON attempts (state);
CREATE INDEX attempts_by_step ON attempts (step) WHERE step IS NOT NULL;

-- One row for each committed sample.
CREATE TABLE samples (
    grp INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    crc INTEGER NOT NULL,           -- of the payload
    num_tokens INTEGER NOT NULL,
    num_live_tokens INTEGER NOT NULL,
    reward REAL,
    truncated INTEGER NOT NULL,
    oldest INTEGER NOT NULL,        -- version of its oldest token
    newest INTEGER NOT NULL,
    fault TEXT,                     -- why it cannot be trained; the group goes on without it
    generator TEXT NOT NULL,
    spans TEXT NOT NULL,            -- [[version, start, end], …] over its tokens
    PRIMARY KEY (grp, attempt, idx)
) WITHOUT ROWID;
CREATE TABLE payloads (id INTEGER PRIMARY KEY, data BLOB NOT NULL);

-- The batch that is being trained, and the one claimed ahead.
CREATE TABLE claims (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, version INTEGER NOT NULL, staleness_limit INTEGER NOT NULL,
    short INTEGER NOT NULL, group_keys TEXT NOT NULL -- [[grp, attempt], …] in order
);

-- One row for each acknowledged step, and for each rollback.
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    version INTEGER NOT NULL,       -- at which it was trained
    staleness_limit INTEGER NOT NULL, -- in force at its claim
    applied INTEGER NOT NULL,       -- 0: skipped, or a rollback
    reason TEXT NOT NULL,
    settings TEXT NOT NULL,         -- JSON
    digest TEXT NOT NULL,           -- of the weights after it
    group_keys TEXT NOT NULL,       -- [[grp, attempt], …] in order
    optimizer_start REAL NOT NULL,  -- Unix seconds
    optimizer_end REAL NOT NULL,
    payload_bytes INTEGER NOT NULL, -- of its samples
    payloads_kept INTEGER NOT NULL, -- 0: removed to save space
    restored INTEGER,               -- of a rollback: step of the checkpoint that it went back to
    abandoned INTEGER NOT NULL      -- 0, else step of the rollback that gave this one up
);
CREATE INDEX steps_abandoned ON steps (step) WHERE abandoned;

-- One row for each learner process that took the run, and for each rollback.
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, name TEXT NOT NULL, incarnation TEXT NOT NULL);

-- Checkpoints that became valid.
CREATE TABLE checkpoints (step INTEGER NOT NULL, epoch INTEGER NOT NULL, path TEXT NOT NULL, PRIMARY KEY (step, epoch));

CREATE TABLE validations (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, size INTEGER NOT NULL,
    num_scored INTEGER NOT NULL, num_dropped INTEGER NOT NULL, total REAL NOT NULL -- sum of the rewards
);

-- Which versions sampled the tokens that each step trained.
CREATE VIEW trained_tokens AS
SELECT steps.step, steps.version AS trained_at, steps.staleness_limit, s.grp, s.attempt, s.idx,
       json_extract(span.value, '$[0]') AS sampled_at,
       json_extract(span.value, '$[2]') - json_extract(span.value, '$[1]') AS num_tokens
FROM steps
JOIN attempts a ON a.step = steps.step AND a.state = 'trained'
JOIN samples s ON s.grp = a.grp AND s.attempt = a.attempt AND s.fault IS NULL
JOIN json_each(s.spans) AS span
WHERE steps.applied;

-- Each committed sample and what became of it.
CREATE VIEW rollouts AS"""
SCHEMA += f"{ROLLOUTS.rstrip()};\n"
