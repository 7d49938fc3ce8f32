"""
create sqlqueue tables

Revision ID: 3f7c1d08a95e
Revises: 
Create Date: 2026-11-29 21:19:08.865281
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = '3f7c1d08a95e'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('sqlqueue_jobs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('queue', sa.String(length=80).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=80), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=80), 'mysql'), nullable=False),
    sa.Column('name', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('payload', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=False),
    sa.Column('priority', sa.Integer(), nullable=False),
    sa.Column('fair_by', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('ordered_by', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('attempts', sa.Integer(), nullable=False),
    sa.Column('max_attempts', sa.Integer(), nullable=False),
    sa.Column('unique_key', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('due_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('deadline', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=True),
    sa.Column('headers', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('chain', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('batch_id', sa.BigInteger(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('available_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('reserved_until', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=True),
    sa.Column('reserved_by', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('reserved_token', sa.String(length=64).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mysql'), nullable=True),
    sa.Column('last_error', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.PrimaryKeyConstraint('id'),
    mariadb_charset='utf8mb4',
    mariadb_collate='utf8mb4_bin',
    mariadb_engine='InnoDB',
    mysql_charset='utf8mb4',
    mysql_collate='utf8mb4_bin',
    mysql_engine='InnoDB',
    sqlite_autoincrement=True
    )
    op.create_index('sqlqueue_jobs_ready', 'sqlqueue_jobs', ['queue', 'priority', 'fair_by', 'available_at', 'id'], unique=False)
    op.create_table('sqlqueue_failed_jobs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
    sa.Column('queue', sa.String(length=80).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=80), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=80), 'mysql'), nullable=False),
    sa.Column('name', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('payload', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=False),
    sa.Column('priority', sa.Integer(), nullable=False),
    sa.Column('fair_by', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('ordered_by', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('attempts', sa.Integer(), nullable=False),
    sa.Column('max_attempts', sa.Integer(), nullable=False),
    sa.Column('unique_key', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('due_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('deadline', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=True),
    sa.Column('headers', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('chain', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('batch_id', sa.BigInteger(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('reason', sa.String(length=64).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mysql'), nullable=False),
    sa.Column('error_class', sa.String(length=255), nullable=True),
    sa.Column('error_message', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('traceback', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('token', sa.String(length=64).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mysql'), nullable=True),
    sa.Column('worker', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=True),
    sa.Column('failed_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    mariadb_charset='utf8mb4',
    mariadb_collate='utf8mb4_bin',
    mariadb_engine='InnoDB',
    mysql_charset='utf8mb4',
    mysql_collate='utf8mb4_bin',
    mysql_engine='InnoDB'
    )
    op.create_index('sqlqueue_failed_jobs_failed_at', 'sqlqueue_failed_jobs', ['failed_at'], unique=False)
    op.create_index('sqlqueue_failed_jobs_queue', 'sqlqueue_failed_jobs', ['queue', 'failed_at'], unique=False)
    op.create_table('sqlqueue_keys',
    sa.Column('key', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('job_id', sa.BigInteger(), nullable=True),
    sa.Column('owner', sa.String(length=64).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=64), 'mysql'), nullable=True),
    sa.Column('count', sa.Integer(), nullable=True),
    sa.Column('expires_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=True),
    sa.PrimaryKeyConstraint('key'),
    mariadb_charset='utf8mb4',
    mariadb_collate='utf8mb4_bin',
    mariadb_engine='InnoDB',
    mysql_charset='utf8mb4',
    mysql_collate='utf8mb4_bin',
    mysql_engine='InnoDB'
    )
    op.create_index('sqlqueue_keys_expires_at', 'sqlqueue_keys', ['expires_at'], unique=False)
    op.create_table('sqlqueue_workers',
    sa.Column('id', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('queues', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=False),
    sa.Column('since', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('heartbeat', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.Column('asleep', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    mariadb_charset='utf8mb4',
    mariadb_collate='utf8mb4_bin',
    mariadb_engine='InnoDB',
    mysql_charset='utf8mb4',
    mysql_collate='utf8mb4_bin',
    mysql_engine='InnoDB'
    )
    op.create_table('sqlqueue_controls',
    sa.Column('name', sa.String(length=190).with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mariadb').with_variant(mysql.VARCHAR(charset='ascii', collation='ascii_bin', length=190), 'mysql'), nullable=False),
    sa.Column('value', sa.Text().with_variant(mysql.LONGTEXT(), 'mariadb').with_variant(mysql.LONGTEXT(), 'mysql'), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), 'mysql', 'mariadb'), nullable=False),
    sa.PrimaryKeyConstraint('name'),
    mariadb_charset='utf8mb4',
    mariadb_collate='utf8mb4_bin',
    mariadb_engine='InnoDB',
    mysql_charset='utf8mb4',
    mysql_collate='utf8mb4_bin',
    mysql_engine='InnoDB'
    )
    if op.get_context().dialect.name == 'postgresql':
        # Every claim rewrites its row: leave room for that on the page, and vacuum early.
        op.execute('ALTER TABLE sqlqueue_jobs SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0)')


def downgrade() -> None:
    op.drop_table('sqlqueue_controls')
    op.drop_table('sqlqueue_workers')
    op.drop_index('sqlqueue_keys_expires_at', table_name='sqlqueue_keys')
    op.drop_table('sqlqueue_keys')
    op.drop_index('sqlqueue_failed_jobs_queue', table_name='sqlqueue_failed_jobs')
    op.drop_index('sqlqueue_failed_jobs_failed_at', table_name='sqlqueue_failed_jobs')
    op.drop_table('sqlqueue_failed_jobs')
    op.drop_index('sqlqueue_jobs_ready', table_name='sqlqueue_jobs')
    op.drop_table('sqlqueue_jobs')
