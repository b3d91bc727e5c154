-- Registers a worker under a lease, by the server's clock, and extends its entries with it.
-- KEYS[1] sorted set: worker scored by the millisecond at which its lease ends
-- KEYS[2] hash: worker to its record
-- KEYS[3] sorted set: cached prefixes of this worker, as in note_prefixes.lua
-- ARGV[1] worker, ARGV[2] record, ARGV[3] lease in milliseconds, ARGV[4] milliseconds to keep the registry itself
-- returns 1
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
redis.call('ZADD', KEYS[1], now_ms() + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
