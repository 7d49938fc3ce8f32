-- The tables of sqlqueue, as printed by: sqlqueue install --sql --dialect mysql

CREATE TABLE sqlqueue_jobs (
    id BIGINT NOT NULL AUTO_INCREMENT,
    queue VARCHAR(80) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    payload LONGTEXT NOT NULL,
    priority INTEGER NOT NULL,
    fair_by VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ordered_by VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    unique_key VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    due_at DATETIME(6) NOT NULL,
    deadline DATETIME(6),
    headers LONGTEXT,
    chain LONGTEXT,
    batch_id BIGINT,
    created_at DATETIME(6) NOT NULL,
    available_at DATETIME(6) NOT NULL,
    reserved_until DATETIME(6),
    reserved_by VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    reserved_token VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
    last_error LONGTEXT,
    PRIMARY KEY (id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX sqlqueue_jobs_ready ON sqlqueue_jobs (queue, priority, fair_by, available_at, id);

CREATE TABLE sqlqueue_failed_jobs (
    id BIGINT NOT NULL,
    queue VARCHAR(80) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    payload LONGTEXT NOT NULL,
    priority INTEGER NOT NULL,
    fair_by VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ordered_by VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    unique_key VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    due_at DATETIME(6) NOT NULL,
    deadline DATETIME(6),
    headers LONGTEXT,
    chain LONGTEXT,
    batch_id BIGINT,
    created_at DATETIME(6) NOT NULL,
    reason VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    error_class VARCHAR(255),
    error_message LONGTEXT,
    traceback LONGTEXT,
    token VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
    worker VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin,
    failed_at DATETIME(6) NOT NULL,
    PRIMARY KEY (id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX sqlqueue_failed_jobs_failed_at ON sqlqueue_failed_jobs (failed_at);

CREATE INDEX sqlqueue_failed_jobs_queue ON sqlqueue_failed_jobs (queue, failed_at);

CREATE TABLE sqlqueue_keys (
    `key` VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    job_id BIGINT,
    owner VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
    count INTEGER,
    expires_at DATETIME(6),
    PRIMARY KEY (`key`)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX sqlqueue_keys_expires_at ON sqlqueue_keys (expires_at);

CREATE TABLE sqlqueue_workers (
    id VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    queues LONGTEXT NOT NULL,
    since DATETIME(6) NOT NULL,
    heartbeat DATETIME(6) NOT NULL,
    asleep BOOL NOT NULL,
    PRIMARY KEY (id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE sqlqueue_controls (
    name VARCHAR(190) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    value LONGTEXT,
    created_at DATETIME(6) NOT NULL,
    PRIMARY KEY (name)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
