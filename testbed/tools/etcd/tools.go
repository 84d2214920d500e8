//go:build tools

// Package tools pins what the test bed builds here: `go mod tidy` keeps what these imports need.
package tools

import (
	_ "go.etcd.io/etcd/server/v3"
)
