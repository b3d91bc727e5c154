-- Forgets a session.
-- KEYS[1] hash, KEYS[2] string, as in record.lua
-- ARGV[1] epoch of the caller; empty forgets it whoever has it
-- returns 1, or -1 where the epoch is over
own(KEYS[1], 'hash')
if ARGV[1] ~= '' and count(KEYS[1], 'epoch') > tonumber(ARGV[1]) then
    return -1
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
