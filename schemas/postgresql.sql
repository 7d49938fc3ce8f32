-- The tables of sqlqueue, as printed by: sqlqueue install --sql --dialect postgresql

CREATE TABLE sqlqueue_jobs (
    id BIGSERIAL NOT NULL,
    queue VARCHAR(80) NOT NULL,
    name VARCHAR(190) NOT NULL,
    payload TEXT NOT NULL,
    priority INTEGER NOT NULL,
    fair_by VARCHAR(190) NOT NULL,
    ordered_by VARCHAR(190),
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    unique_key VARCHAR(190),
    due_at TIMESTAMP WITH TIME ZONE NOT NULL,
    deadline TIMESTAMP WITH TIME ZONE,
    headers TEXT,
    chain TEXT,
    batch_id BIGINT,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    available_at TIMESTAMP WITH TIME ZONE NOT NULL,
    reserved_until TIMESTAMP WITH TIME ZONE,
    reserved_by VARCHAR(190),
    reserved_token VARCHAR(64),
    last_error TEXT,
    PRIMARY KEY (id)
);

CREATE INDEX sqlqueue_jobs_ready ON sqlqueue_jobs (queue, priority, fair_by, available_at, id);

ALTER TABLE sqlqueue_jobs SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE sqlqueue_failed_jobs (
    id BIGINT NOT NULL,
    queue VARCHAR(80) NOT NULL,
    name VARCHAR(190) NOT NULL,
    payload TEXT NOT NULL,
    priority INTEGER NOT NULL,
    fair_by VARCHAR(190) NOT NULL,
    ordered_by VARCHAR(190),
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    unique_key VARCHAR(190),
    due_at TIMESTAMP WITH TIME ZONE NOT NULL,
    deadline TIMESTAMP WITH TIME ZONE,
    headers TEXT,
    chain TEXT,
    batch_id BIGINT,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    reason VARCHAR(64) NOT NULL,
    error_class VARCHAR(255),
    error_message TEXT,
    traceback TEXT,
    token VARCHAR(64),
    worker VARCHAR(190),
    failed_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX sqlqueue_failed_jobs_failed_at ON sqlqueue_failed_jobs (failed_at);

CREATE INDEX sqlqueue_failed_jobs_queue ON sqlqueue_failed_jobs (queue, failed_at);

CREATE TABLE sqlqueue_keys (
    key VARCHAR(190) NOT NULL,
    job_id BIGINT,
    owner VARCHAR(64),
    count INTEGER,
    expires_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (key)
);

CREATE INDEX sqlqueue_keys_expires_at ON sqlqueue_keys (expires_at);

CREATE TABLE sqlqueue_workers (
    id VARCHAR(190) NOT NULL,
    queues TEXT NOT NULL,
    since TIMESTAMP WITH TIME ZONE NOT NULL,
    heartbeat TIMESTAMP WITH TIME ZONE NOT NULL,
    asleep BOOLEAN NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE sqlqueue_controls (
    name VARCHAR(190) NOT NULL,
    value TEXT,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (name)
);
