package main

import "sync"

// nameLocks has a lock for each name: what takes long for one channel holds up no other.
type nameLocks struct {
	mu    sync.Mutex
	locks map[string]*nameLock
}

type nameLock struct {
	sync.Mutex
	users int
}

// lock waits for the lock of a name, and returns what unlocks it.
func (n *nameLocks) lock(name string) (unlock func()) {
	n.mu.Lock()
	found := n.locks[name]
	if found == nil {
		if n.locks == nil {
			n.locks = map[string]*nameLock{}
		}
		found = &nameLock{}
		n.locks[name] = found
	}
	found.users++
	n.mu.Unlock()
	found.Lock()
	return func() {
		found.Unlock()
		n.mu.Lock()
		defer n.mu.Unlock()
		if found.users--; found.users == 0 {
			delete(n.locks, name)
		}
	}
}
