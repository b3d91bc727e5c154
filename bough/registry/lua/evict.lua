-- Evicts the entries that expire soonest; one whose expiry has changed meanwhile is kept.
-- KEYS[1] and KEYS[2]: ledger, as in prelude.lua; KEYS[3...] of each entry the hash and the string, as in record.lua
-- ARGV of each entry the name and the time at which it ends, as `enter` in prelude.lua gave them
-- returns the number of removed entries
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
local num_removed = 0
for index = 1, #ARGV, 2 do
    if redis.call('ZSCORE', KEYS[1], ARGV[index]) == ARGV[index + 1] then
        redis.call('DEL', KEYS[index + 2], KEYS[index + 3])
        leave(KEYS[1], KEYS[2], ARGV[index])
        num_removed = num_removed + 1
    end
end
return num_removed
