-- Leases a place in the registry for a while, by the server's own clock.
-- KEYS[1] sorted set: member scored by the millisecond at which its lease ends
-- KEYS[2] hash: member to its record
-- ARGV[1] member, ARGV[2] record, ARGV[3] lease in milliseconds
-- returns 1
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
