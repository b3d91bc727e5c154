-- Loads a session or a request.
-- KEYS[1] hash, KEYS[2] string, as in record.lua
-- returns the record and the tokens (false if missing), and the newest epoch that was granted, in decimal
own_entry(KEYS[1], KEYS[2])
return {redis.call('HGET', KEYS[1], 'record'), redis.call('GET', KEYS[2]), as_text(count(KEYS[1], 'epoch'))}
