//go:build tools

// Package tools pins what the test bed builds here: `go mod tidy` keeps what these imports need.
package tools

import (
	_ "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"
)
